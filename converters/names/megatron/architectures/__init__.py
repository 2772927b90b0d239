"""One module per architecture, named after the config's `model_type`, with its `TABLE`."""
