"""Training from a configuration: models, data, the loop, its records and checkpoints, and how ranks are started."""
