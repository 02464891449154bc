"""Memory is full: who yields?"""
