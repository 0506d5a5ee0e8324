"""Jobs whose processes another library has started."""
