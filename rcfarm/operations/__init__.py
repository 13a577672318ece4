"""The operators' verbs over the store, used by CLI and dev: RCs, nodes, brake, the rc file."""
