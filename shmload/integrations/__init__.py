"""Ways into frameworks that do not take a DataLoader subclass as it is: one framework a file, imported only by its own file."""
