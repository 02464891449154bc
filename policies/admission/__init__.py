"""May it come in?"""
