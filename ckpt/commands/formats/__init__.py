"""`ckpt formats`: the formats that can be read and written."""
