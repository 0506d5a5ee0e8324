"""Point-to-point messages: connections, frames, matching by source and tag, progress."""
