"""Device programs: `@triton.jit` functions and their tile tables. Imports triton only, never torch."""
