"""How fast attention is, beside every kernel of this machine: `assay bench attention`."""
