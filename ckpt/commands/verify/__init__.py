"""`ckpt verify`: bit-for-bit comparison with another checkpoint or with the folder's manifest."""
