/* The first sector of the disk: loads what `pieces` lists, switches to 64 bits and to all the
 * vector registers that the processor has, and enters the system.
 *
 * bochs.py fills in `first`, the address to enter, and `pieces`: for each its address, first sector
 * and number of sectors; an address of 0 ends them. Memory below 4 GB is at its own addresses, and
 * all of it may be written and run.
 */
#define AT(label) (0x7c00 + label - start)
#define MAPS 0x70000            /* of memory: two pages, for PML4 and PDPT */

.code16
start:
    cli
    xorw %ax, %ax
    movw %ax, %ds
    lgdtl AT(table_pointer)
    movl %cr0, %eax
    orb $1, %al
    movl %eax, %cr0
    ljmpl $0x18, $AT(flat)

.code32
flat:
    movw $0x10, %ax
    movw %ax, %ds
    movw %ax, %es
    movw %ax, %ss
    cld
    movl $AT(pieces), %ebx
piece:
    movl (%ebx), %edi
    testl %edi, %edi
    jz maps
    movl 4(%ebx), %esi
    movl 8(%ebx), %ebp
sector:                         /* by its number, from the first IDE disk */
    movw $0x1f2, %dx
    movb $1, %al
    outb %al, %dx
    movl %esi, %eax
    incw %dx
    outb %al, %dx
    shrl $8, %eax
    incw %dx
    outb %al, %dx
    shrl $8, %eax
    incw %dx
    outb %al, %dx
    shrl $8, %eax
    orb $0xe0, %al
    incw %dx
    outb %al, %dx
    movb $0x20, %al
    incw %dx
    outb %al, %dx
ready:                          /* not busy, and has data */
    inb %dx, %al
    andb $0x88, %al
    cmpb $0x08, %al
    jne ready
    movw $0x1f0, %dx
    movl $128, %ecx
    rep insl
    incl %esi
    decl %ebp
    jnz sector
    addl $12, %ebx
    jmp piece

maps:                           /* four pages of 1 GB */
    movl $MAPS, %edi
    movl $2048, %ecx
    xorl %eax, %eax
    rep stosl
    movl $MAPS + 0x1003, MAPS
    movl $MAPS + 0x1000, %edi
    movl $0x83, %eax
    movl $4, %ecx
page:
    movl %eax, (%edi)
    addl $8, %edi
    addl $0x40000000, %eax
    loop page
    movl $MAPS, %eax
    movl %eax, %cr3
    movl $0x40620, %eax         /* PAE, SSE with its exceptions, XSAVE */
    movl %eax, %cr4
    movl $0xc0000080, %ecx      /* EFER: 64 bits, and the instruction `syscall` */
    movl $0x101, %eax
    xorl %edx, %edx
    wrmsr
    movl $0x80000023, %eax      /* paging, errors of the FPU as exceptions */
    movl %eax, %cr0
    movl $0x0d, %eax            /* XCR0: what there is of x87, SSE, AVX, AVX-512's three parts */
    xorl %ecx, %ecx
    cpuid
    andl $0xe7, %eax
    xorl %edx, %edx
    xorl %ecx, %ecx
    xsetbv
    fninit
    ljmpl $0x08, $AT(enter)
.code64
enter:
    movl AT(first), %eax
    jmp *%rax

.balign 8
table:                          /* 64-bit code and data, and 32-bit code */
    .quad 0, 0x00af9b000000ffff, 0x00cf93000000ffff, 0x00cf9b000000ffff
table_pointer:
    .word 31
    .long AT(table)
.org 0x1c0
first:
    .long 0
pieces:
    .space 36
.org 0x1fe
    .word 0xaa55
