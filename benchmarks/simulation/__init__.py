"""Fleets on a computed clock: the product's scheduler, prefix trees and router, over steps whose time is a number."""
