"""Run the one benchmark that there is."""

from benchmarks.overhead import main

main()
