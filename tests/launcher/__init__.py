"""The launchers and the rendezvous."""
