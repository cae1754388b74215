"""The demo: networks in plain NumPy learn to read digits, and their optimizer is timed."""
