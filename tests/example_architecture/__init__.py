"""An architecture declared in one file, as docs/new-architecture.md says."""
