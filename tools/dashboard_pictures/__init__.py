"""Draws Grafana's dashboards with Grafana's own components, and checks the pictures."""
