"""Control plane: decides which block lives in which slot. Imports no torch and moves no bytes."""
