"""Decide what runs next: requests as sequences, slots, chunks. No I/O, no clock."""
