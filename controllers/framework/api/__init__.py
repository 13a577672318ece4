"""Frameworkcontroller's wire contract: types, codes, CRD, validation."""
