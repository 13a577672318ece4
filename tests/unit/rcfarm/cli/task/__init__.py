"""Tests of `rcfarm task` and `rcfarm quota`."""
