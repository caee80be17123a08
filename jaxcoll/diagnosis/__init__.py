"""What a process tells about itself, and what can be read from that when a job does not go on."""
