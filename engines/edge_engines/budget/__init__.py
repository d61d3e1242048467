"""Choose a form for every unit, float, INT8 or weights in 8 or 4 bits: the smallest engine that passes the gate."""
