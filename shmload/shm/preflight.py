def check_fits(nbytes,*,num_slots,slot_nbytes): pass
