"""Benchmarks that anybody can run: models, contenders, measurements, and the pages made of them."""
