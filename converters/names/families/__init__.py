"""Names and shapes of the tensors in the Hub's files of an architecture, by tables.  Imports no other names."""
