"""Connections between ranks, the exchange that begins a collective, and the selection of the
transport."""
