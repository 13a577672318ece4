"""The task engine: plugins that drive long external work through durable phases, under leased quotas."""
