"""`ckpt resume`: search for the folder to resume from, on the current processes and engine."""
