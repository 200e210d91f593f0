"""One file for each section of the paper; each has an EXPERIMENT."""
