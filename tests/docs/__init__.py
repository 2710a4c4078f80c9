"""What the documentation promises."""
