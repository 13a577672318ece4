#!/bin/sh
# How HiveD's own manifest starts what is in its image, so that only the image has to be changed there.
exec rcfarm extender "$@"
