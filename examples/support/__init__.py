"""What the examples share and what isn't about training: data, reports, measurements."""
