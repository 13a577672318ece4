"""All settings, one module per topic, and where they are read from."""
