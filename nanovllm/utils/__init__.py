"""What several parts of the engine share."""
