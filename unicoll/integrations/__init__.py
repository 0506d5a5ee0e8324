"""unicoll in jobs of Dask and Ray. Each module needs the package of its name.

Nothing in unicoll imports this package.
"""
