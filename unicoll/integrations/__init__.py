"""unicoll in jobs of other packages; each module needs the package of its name."""
