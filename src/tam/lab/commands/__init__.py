"""The commands below `tam lab`."""
