"""Tables with an architecture's tensor names and shapes in the Hub's files. Imports no other names."""
