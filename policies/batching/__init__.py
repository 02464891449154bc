"""How many tokens each?"""
