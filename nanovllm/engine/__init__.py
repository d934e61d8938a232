"""The engine: scheduling on the CPU side, execution on the device side."""
