"""Sources of skills."""
