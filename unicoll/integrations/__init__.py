"""unicoll as a backend of other packages; each module needs the package of its name."""
