"""Export through OpenTelemetry providers: samplers, limits, processors and views of the program apply."""
