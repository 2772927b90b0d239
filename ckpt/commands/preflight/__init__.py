"""`ckpt preflight`: are the nodes of a job alike?"""
