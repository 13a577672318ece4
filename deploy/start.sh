#!/bin/sh
# What the manifests of HiveD and frameworkcontroller call, after copying their file into this folder.
exec python -m rcfarm.drop_in "$@"
