"""`ckpt push`: upload of a folder to the Hugging Face Hub, with verified checksums."""
