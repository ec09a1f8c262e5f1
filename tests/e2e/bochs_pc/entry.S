/* What C can't say: the start, the way into a system call and out of it, and a change of thread.
 * Vector registers are left alone by the system's own code.
 */
.globl entry, exception, invalid, system_call, start_thread, switch_thread, main_stack_top

.text
entry:
    leaq main_stack_top(%rip), %rsp
    jmp system_main

exception:                      /* of any kind: with an error code on the stack, or without */
    movq %rsp, %rdi
    leaq main_stack_top(%rip), %rsp
    jmp system_exception

/* An instruction that the processor refuses: `repair` says where what does the same is, if
 * anywhere. That ends with a return from the exception. */
invalid:
    pushq %rax                  /* room for that address */
    pushq %rax
    pushq %rcx
    pushq %rdx
    pushq %rsi
    pushq %rdi
    pushq %r8
    pushq %r9
    pushq %r10
    pushq %r11
    leaq 80(%rsp), %rdi
    cld
    call repair
    movq %rax, 72(%rsp)
    popq %r11
    popq %r10
    popq %r9
    popq %r8
    popq %rdi
    popq %rsi
    popq %rdx
    popq %rcx
    popq %rax
    ret

/* rax: number; rdi, rsi, rdx, r10, r8, r9: arguments; rcx: where to go on; r11: flags. All but rax
 * are as before when the program goes on. */
system_call:
    movq %rsp, program_stack(%rip)
    movq system_stack(%rip), %rsp
    pushq program_stack(%rip)
    pushq %rcx
    pushq %r11
    pushq %r9
    pushq %r8
    pushq %r10
    pushq %rdx
    pushq %rsi
    pushq %rdi
    pushq %rax
    movq %rsp, %rdi
    call system_answer
    addq $8, %rsp
back:
    popq %rdi
    popq %rsi
    popq %rdx
    popq %r10
    popq %r8
    popq %r9
    popfq
    popq %rcx
    popq %rsp
    jmp *%rcx

/* What a new thread's stack returns to: its registers lie above, as in a call. */
start_thread:
    xorl %eax, %eax
    jmp back

/* switch_thread(uint64_t *from, uint64_t to): stacks of the system. */
switch_thread:
    pushq %rbx
    pushq %rbp
    pushq %r12
    pushq %r13
    pushq %r14
    pushq %r15
    movq %rsp, (%rdi)
    movq %rsi, %rsp
    popq %r15
    popq %r14
    popq %r13
    popq %r12
    popq %rbp
    popq %rbx
    ret

.bss
.balign 64
    .space 65536
main_stack_top:
    .space 64
