"""Jobs whose processes another library has started; each module is for one such library, and imports it."""
