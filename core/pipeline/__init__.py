"""The engine process: stages in order, what may stop them, and how a run is launched and resumed.

The only package that knows the order of the stages. Never loads torch: torch stages are child
processes."""
