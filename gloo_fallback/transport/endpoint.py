"""The kinds of the CPU backend's connections, which :class:`unicoll.backend.endpoint.Endpoint` makes."""

from unicoll.backend.endpoint import MESSAGES as MESSAGES
from unicoll.backend.endpoint import Endpoint as Endpoint

COLLECTIVE = "c"
