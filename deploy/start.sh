#!/bin/sh
# Called by the manifests of HiveD and frameworkcontroller, after they have copied their file into this folder.
exec python -m rcfarm.cli.daemons.drop_in "$@"
