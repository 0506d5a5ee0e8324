"""x"""

from .hash import HashStore


class FileStore(HashStore):
    pass
