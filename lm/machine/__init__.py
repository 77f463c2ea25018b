"""What a run stands on: device and precision, memory in use, files that are whole or absent."""
