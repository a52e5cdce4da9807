"""The interface as a user meets it. A package, so that its files may be called like those of others."""
